"""One file a component: its domains and its table of rows.

How to write a component's contract (`codecs.py` is the example):

1. `components/STEM.py` ends in CONTRACTS, a tuple with one `Contract` for each public function.
2. A `Domain` is a named set of inputs. `build(spec, device)` turns a small JSON-able dict into `Call(args, kwargs)`, and must build the
   same tensors from the same spec every time: draw them on the CPU from `spec["seed"]` (`strategies.values`, `strategies.random_bits`,
   `strategies.generator`, `lattices.integers`) and move them. Give either `strategy=strategies.specs(rows=strategies.rows(), …,
   seed=strategies.seeds())`, from which specs are drawn and shrunk (draw sizes, options, classes of values, places of specials; never
   elements), or `exhaustive=N`, whose specs are {"first", "count"}, parts of range(N): use it wherever a domain has at most 2^16 values;
   more run under the soak profile alone. Keep sizes small: smoke runs 8 cases of each drawn check and all of every exhaustive one, in a
   few seconds a component. `strategies.some_of(strategies.VALUE_CLASSES)` draws the adversarial classes; one tensor holds all those
   drawn, group by group. Options can be drawn too: put them into the spec as strings.
3. An `Output` is a row: field of the result ("result" for a lone tensor; fields in the order of the result), level, why it holds, and
   the domains it speaks for (none named: all). Every contract has a bitwise row. Set `strides=True` where the strides are promised, and
   `view=` where bytes beyond the elements are (pad words): a function from the tensor to one that shows the storage around them. E3 rows
   take `bound(call, exact)`, from `bounds`, and the contract `exact=`, the reference with its roundings off.
4. Invariants: `invariants.on("drawn", "run_to_run", "inputs_unchanged", "poisoned_output", "batch", "padding", "strides", "empty",
   "fullgraph", "opcheck", "graph_replay")`, as many as apply, on a drawn domain that is cheap (graph_replay changes
   spec["seed"]). `batch`, `padding` and `empty` want `rows=Rows(arguments)`: the arguments whose first dimension counts rows, and, where
   an output is not row by row (a swizzled layout), `read(call, name, tensor)`, which makes it so. `guards` tests a caller's `out`
   buffers. What is deliberately not promised goes into `not_claimed`.
5. `test_STEM.py` beside the engine: copy `test_codecs.py` and change COMPONENT.
6. `mutants/STEM.py` ends in MUTANTS, at least four wrong versions: Mutant(id, component, function, call, fault, source), each the wrong
   thing in as few lines as possible (most wrap the reference), `source` the id of the public bug report where there is one. Zeros, the
   previous output and the input come for nothing. `python -m dsv4.parity --mutants --dsv4-component STEM` must kill all. A mutant that
   survives is a hole in the domains, not in the mutant.
"""
