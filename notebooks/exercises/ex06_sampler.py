"""Exercise 6: the sampler: temperature, top-k and top-p. Read notebooks/03_decode_loop.ipynb first.

Grade it with `pytest tests/exercises --impl student -k ex06`.
"""

from torch import Tensor


def sampling_weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> Tensor:
    """For each token of each row a weight in proportion to its chance to be drawn, float32 `[n, vocab]`.

    The engine draws one token for each row with these weights. Rows are different requests, each with its own numbers;
    each row is as if it were alone. Row by row:

    1. The probabilities are the softmax of `logits / temperature`. logits: float32 `[n, vocab]`, which must stay as
       they are; temperature: float32 `[n]`, above 0. A temperature may be tiny (1e-36) and logits large (1e4): subtract
       the row's largest logit before you divide.
    2. top_k, int64 `[n]`: only the k most likely tokens stay. 0 stands for all of them, and so does a k above vocab.
    3. top_p, float32 `[n]`, in (0, 1]: of what top_k left, taken as the whole, only the most likely tokens stay: as few
       as have a probability of at least p together. That is one token at the least; and 1 keeps all.

    A token that does not stay has weight 0. The others keep their proportions; whether a row sums to 1 does not matter.
    Which of several equally likely tokens at the edge stay is up to you.

    width: no row needs more than so many of the most likely tokens in order, and 0 says that no row has a top_k or a
    top_p. A sort of fewer tokens costs less. You need not use it.

    Example:

        >>> logits = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]).log()
        >>> one = torch.ones(2)
        >>> weights = sampling_weights(logits, one, torch.tensor([2, 0]), torch.tensor([1.0, 0.4]), 3)
        >>> weights / weights.sum(-1, keepdim=True)
        tensor([[0.6250, 0.3750, 0.0000],
                [1.0000, 0.0000, 0.0000]])
    """
    raise NotImplementedError("Exercise 6: write sampling_weights; see notebooks/03_decode_loop.ipynb")
