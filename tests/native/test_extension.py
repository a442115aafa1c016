"""The compiled extension is what its types say."""

import inspect

import pytest

from jax_ep import _extension
from jax_ep._extension import Extension


def test_types():
    module = _extension.extension()
    if module is None:
        pytest.fail("the extension is not there")
    offered = {name: function for name, function in vars(module).items() if not name.startswith("_")}
    typed = {name: method for name, method in vars(Extension).items() if not name.startswith("_")}
    if "nccl" in module.build_info():  # all parts are there
        assert set(offered) == set(typed)
    assert set(offered) <= set(typed)
    for name, function in offered.items():
        signature = function.__doc__.splitlines()[0].replace("collections.abc.", "")
        said = str(inspect.signature(typed[name])).replace("typing.", "").replace("collections.abc.", "")
        said = said.replace("dict[str, Any]", "dict")
        assert signature == name + said.replace("(self, ", "(").replace("(self)", "()")
