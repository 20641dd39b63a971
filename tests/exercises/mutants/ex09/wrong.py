"""Wrong solutions: the first right one with texts replaced. Which test finds each, and what is wrong with it."""

WRONG = {
    "no_replay": (
        "test_a_replay_gives_the_results_of_the_batch",
        "nothing is replayed: what was there before is returned",
        [("        self.graph.replay()\n", "")],
    ),
    "loads_after_the_replay": (
        "test_a_replay_gives_the_results_of_the_batch",
        "each result is that of the batch before",
        [
            (
                "        self.inputs.load(batch)\n        self.graph.replay()\n",
                "        self.graph.replay()\n        self.inputs.load(batch)\n",
            )
        ],
    ),
    "loads_nothing": (
        "test_a_replay_gives_the_results_of_the_batch",
        "the static inputs stay as they were",
        [("        self.inputs.load(batch)\n", "")],
    ),
    "new_inputs_each_time": (
        "test_a_replay_gives_the_results_of_the_batch",
        "the batch takes the place of the static inputs, and the graph reads the old address",
        [("self.inputs.load(batch)", "self.inputs = batch")],
    ),
    "stale_result": (
        "test_a_replay_gives_the_results_of_the_batch",
        "the result of the first run is kept and returned for ever",
        [
            (
                "        self.inputs.load(batch)\n        self.graph.replay()\n",
                "        self.inputs.load(batch)\n        self.graph.replay()\n"
                "        if not hasattr(self, 'kept'):\n            self.kept = self.logits.clone()\n"
                "        return self.kept[: len(batch)]\n",
            )
        ],
    ),
    "the_whole_bucket": (
        "test_a_smaller_batch_gets_its_own_rows",
        "padded rows are returned, too",
        [("self.logits[: len(batch)]", "self.logits")],
    ),
    "last_rows": (
        "test_a_smaller_batch_gets_its_own_rows",
        "the last rows of the bucket",
        [("self.logits[: len(batch)]", "self.logits[-len(batch) :]")],
    ),
    "eager": (
        "test_the_step_is_captured_once_and_replayed_from_then_on",
        "the step runs eagerly, graph or no graph",
        [
            ("        self.inputs = inputs\n", "        self.inputs, self.step = inputs, step\n"),
            ("        self.graph.replay()\n", "        self.logits = self.step()\n"),
        ],
    ),
    "captures_each_time": (
        "test_the_step_is_captured_once_and_replayed_from_then_on",
        "every run captures anew",
        [
            (
                "        self.inputs = inputs\n",
                "        self.inputs, self.again = inputs, lambda: backend.capture(step, pool, stream)\n",
            ),
            (
                "        self.graph.replay()\n",
                "        self.graph, self.logits = self.again()\n        self.graph.replay()\n",
            ),
        ],
    ),
    "clone": (
        "test_the_next_replay_overwrites_the_result",
        "a copy in every step",
        [("self.logits[: len(batch)]", "self.logits[: len(batch)].clone()")],
    ),
    "graph_not_reset": (
        "test_reset_gives_the_memory_back",
        "the graph keeps its pool",
        [("        self.graph.reset()\n", "")],
    ),
    "logits_kept": (
        "test_reset_gives_the_memory_back",
        "a tensor that is held keeps its memory",
        [("        self.logits = None\n", "")],
    ),
}
