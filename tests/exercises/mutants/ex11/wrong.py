"""Wrong solutions: the first right one with texts replaced. Which test finds each, and what is wrong with it."""

WRONG = {
    "zeros": (
        "test_there_is_one_buffer_of_which_views_are_handed_out",
        "zeros look like numbers that somebody wrote",
        [('float("nan")', "0.0")],
    ),
    "half": (
        "test_there_is_one_buffer_of_which_views_are_handed_out",
        "a buffer in half precision",
        [('float("nan"), device=device', 'float("nan"), device=device, dtype=torch.bfloat16')],
    ),
    "view_is_a_copy": (
        "test_there_is_one_buffer_of_which_views_are_handed_out",
        "a copy of the rows",
        [("return self.tensor[start : start + rows]", "return self.tensor[start : start + rows].clone()")],
    ),
    "from_the_start": (
        "test_what_is_stored_is_found_in_its_rows",
        "the second half of a batch overwrites the first",
        [("place = self.view(start, logits.shape[0])", "place = self.view(0, logits.shape[0])")],
    ),
    "replaces_the_buffer": (
        "test_what_is_stored_is_found_in_its_rows",
        "a new buffer with each store: graphs know the old address",
        [("        place.copy_(logits)\n", "        self.tensor = self.tensor.clone()\n        place.copy_(logits)\n")],
    ),
    "stores_nothing": (
        "test_what_is_stored_is_found_in_its_rows",
        "the buffer stays as it was",
        [("        place.copy_(logits)\n", "")],
    ),
    "logits_for_each_graph": (
        "test_no_graph_has_logits_of_its_own",
        "each graph keeps the logits that came in",
        [("        return place\n", "        return logits.float()\n")],
    ),
    "keeps_what_came_in": (
        "test_no_graph_has_logits_of_its_own",
        "a reference to every tensor that came in",
        [
            (
                "        return place\n",
                "        self.__dict__.setdefault('all', []).append(logits)\n        return place\n",
            )
        ],
    ),
}
