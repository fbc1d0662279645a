"""The compiled twins of `dsv4.reference`: same functions, same results, chosen for the device at each call.

`use()` demands a backend or a property, `backends()` lists what there is and why not, `explain()` says what one function would get,
`warmup()` compiles and proves what a model needs before it serves.
"""

from dsv4.fast import (
    attention,
    codecs,
    compressor,
    eplb,
    hyper_connections,
    indexer,
    kv_cache,
    linear,
    norms,
    output_projection,
    quantization,
    rotary,
    routing,
    scales,
)
from dsv4.fast.dispatch import use
from dsv4.fast.status import BackendStatus, backends, explain
from dsv4.fast.warmup import WarmupReport, warmup

__all__ = [
    "BackendStatus",
    "WarmupReport",
    "attention",
    "backends",
    "codecs",
    "compressor",
    "eplb",
    "explain",
    "hyper_connections",
    "indexer",
    "kv_cache",
    "linear",
    "norms",
    "output_projection",
    "quantization",
    "rotary",
    "routing",
    "scales",
    "use",
    "warmup",
]
