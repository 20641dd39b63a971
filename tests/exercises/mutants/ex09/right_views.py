"""Right: a view for each number of rows, made once, in one dict that is emptied in the end."""


class CapturedStep:
    def __init__(self, step, inputs, backend, pool, stream):
        self._load = inputs.load
        self._graph, logits = backend.capture(step, pool, stream)
        self._views = {rows: logits.narrow(0, 0, rows) for rows in range(1, logits.shape[0] + 1)}

    def run(self, batch):
        self._load(batch)
        self._graph.replay()
        return self._views[len(batch)]

    def reset(self):
        self._views.clear()
        self._graph.reset()
