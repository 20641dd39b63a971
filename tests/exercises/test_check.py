"""What a solution may not take from elsewhere is found, however it is written; what it may take is not."""

import pytest

from exercises.check import taken
from exercises.grade import earned, grade
from exercises.plugin import STUBS
from exercises.test_mutants import RIGHT

ENGINE = {
    "import": "import tinyengine.kv.blocks",
    "import as": "import tinyengine.kv.blocks as b",
    "import of the package": "import tinyengine",
    "from": "from tinyengine.kv.blocks import BlockAllocator",
    "from the package": "from tinyengine import parts",
    "from what is given, sideways": "from tinyengine.model import attention",
    "importlib": "import importlib\nm = importlib.import_module('tinyengine.kv.blocks')",
    "importlib in pieces": "import importlib\nm = importlib.import_module('tiny' + 'engine')",
    "import_module as a name": "from importlib import import_module as load\nm = load('tinyengine.kv.blocks')",
    "dunder import": "m = __import__('tinyengine.kv.blocks')",
    "exec": "exec('from tinyengine.kv.blocks import BlockAllocator')",
    "eval in pieces": "x = 'a'\nm = eval(x + 'b')",
    "sys.modules": "import sys\nm = sys.modules['tinyengine.kv.blocks']",
    "sys.modules by itself": "import sys\nm = list(sys.modules.values())",
    "the graders": "from exercises.reference.ex04_block_allocator import BlockAllocator",
    "transformers": "from transformers import LlamaModel",
    "within a function": "def f():\n    from tinyengine.kv.blocks import BlockAllocator\n    return BlockAllocator",
}
ATTENTION = {
    "attribute": "import torch.nn.functional as F\ndef f(q, k, v): return F.scaled_dot_product_attention(q, k, v)",
    "from": "from torch.nn.functional import scaled_dot_product_attention as a",
    "getattr": "import torch\nf = getattr(torch.nn.functional, 'scaled_dot_product_attention')",
    "attrgetter": "import operator\nf = operator.attrgetter('nn.functional.scaled_dot_product_attention')",
    "module": "import torch\nm = torch.nn.MultiheadAttention(8, 2)",
    "aten": "import torch\nf = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "dict": "import torch\nf = vars(torch._C._nn)['scaled_dot_product_attention']",
}
ALLOWED = {
    "errors": "from tinyengine.errors import BlockError",
    "inputs": "from tinyengine.model.inputs import DecodeInputs",
    "a word in a text": "raise ValueError('the tinyengine course')",
    "a docstring": "def f():\n    'Unlike scaled_dot_product_attention, or tinyengine.kv.blocks.'",
    "a comment": "x = 1  # not F.scaled_dot_product_attention",
    "other modules": "import heapq\nfrom collections import OrderedDict\nimport numpy as np\nimport torch",
    "a constant": "import importlib\nm = importlib.import_module('math')",
    "not Python": "def f(:",
}


@pytest.mark.parametrize("source", ENGINE.values(), ids=ENGINE)
def test_the_engines_own_part_may_not_be_taken(source):
    assert taken(4, source).startswith("line ")


@pytest.mark.parametrize("source", ATTENTION.values(), ids=ATTENTION)
def test_the_operation_that_an_exercise_is_about_may_not_be_called(source):
    assert "write it yourself" in taken(1, source) and "write it yourself" in taken(5, source)
    assert taken(4, source) is None


@pytest.mark.parametrize("source", ALLOWED.values(), ids=ALLOWED)
def test_what_stubs_give_and_what_is_only_said_is_allowed(source):
    assert taken(1, source) is None


@pytest.mark.parametrize("path", [*STUBS.glob("ex*.py"), *(path for _, path in RIGHT)], ids=lambda path: path.stem)
def test_no_stub_and_no_right_solution_takes_anything(path):
    assert all(taken(number, path.read_text(encoding="utf-8")) is None for number in range(1, 13))


def test_what_takes_the_engines_part_earns_nothing_and_is_told_so(tmp_path):
    path = tmp_path / "ex04_mine.py"
    path.write_text("from tinyengine.kv.blocks import BlockAllocator as BlockAllocator\n")
    results = grade(4, path)
    assert earned(results) == 0
    for result in results:
        assert "ex04_mine.py, line 1: tinyengine.kv.blocks.BlockAllocator is not for solutions" in result.why
