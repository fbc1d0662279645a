"""Outside oracles that do not import as they are shipped.

DeepSeek's tile_kernels holds a PyTorch reference for each of its GPU kernels, but importing the package imports TileLang and asks for a
GPU. The references need neither, so they are loaded from the installed files one by one.
"""

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from unittest import mock

_PACKAGES = ("tile_kernels", "tile_kernels.moe", "tile_kernels.quant", "tile_kernels.torch")
_TILELANG = ("tilelang", "tilelang.contrib", "tilelang.language", "tilelang.utils", "tilelang.utils.target")


@functools.cache
def tile_kernels_module(stem: str) -> ModuleType:
    """`tile_kernels/torch/STEM.py` of the installed distribution: "mhc", "moe", "engram", "topk", "cast", …

    Packages are stood in for by empty ones (no `__init__` runs) and TileLang by a mock. What a reference takes from its
    neighbours, such as the FP4 decoder of `cast_back`, is the distribution's own code.

    Raises:
        importlib.metadata.PackageNotFoundError: tile-kernels is not installed; `make setup` installs it, without its requirements.
    """
    root = Path(str(distribution("tile-kernels").locate_file("")))
    stand_ins: dict[str, ModuleType] = {name: mock.MagicMock(name=name) for name in _TILELANG}
    for name in _PACKAGES:
        stand_ins[name] = ModuleType(name)
        stand_ins[name].__path__ = [str(root.joinpath(*name.split(".")))]
    with _only_inside(stand_ins):
        return importlib.import_module(f"tile_kernels.torch.{stem}")


@contextmanager
def _only_inside(stand_ins: dict[str, ModuleType]) -> Iterator[None]:
    """Put modules into sys.modules, and take out again whatever of tile_kernels and TileLang is there at the end, and nothing else.

    `mock.patch.dict` would forget every module imported meanwhile, and half of torch must not be imported twice.
    """
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tile_kernels", "tilelang")]:
            del sys.modules[name]
