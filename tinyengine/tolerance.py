"""The one table of how far two ways of computing the same thing may differ, for the engine and the tests.

The measure is `relative_error`: norm of the difference over norm of the reference. float32 sums in another order
differ by about 1e-6; a half-precision kernel rounds every product's operands, which gives 3e-3 in bfloat16.
"""

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def relative_error(got: Tensor, reference: Tensor) -> float:
    """`||got - reference|| / ||reference||` in float64, as a Python float; NaN where either holds one."""
    got, reference = got.double(), reference.double()
    return float((got - reference).norm() / reference.norm())
