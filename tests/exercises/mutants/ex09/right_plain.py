"""Right: graph and logits as attributes, deleted in the end."""


class CapturedStep:
    def __init__(self, step, inputs, backend, pool, stream):
        self.inputs = inputs
        self.graph, self.logits = backend.capture(step, pool, stream)

    def run(self, batch):
        self.inputs.load(batch)
        self.graph.replay()
        return self.logits[: len(batch)]

    def reset(self):
        self.graph.reset()
        self.logits = None
