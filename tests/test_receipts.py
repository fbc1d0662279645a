"""Committed receipts can be read, and say whether they are older than the code they speak for."""

import json
import warnings
from pathlib import Path

import pytest

import dsv4.fast  # noqa: F401
from dsv4.fast import dispatch
from dsv4.parity import contracts, receipts

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = sorted(ROOT.joinpath("receipts").glob("*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=[path.stem for path in COMMITTED])
def test_a_committed_receipt(path):
    receipt = receipts.read(path)
    assert receipt["components"]
    failed = {
        (name, row["function"], row["domain"], row["candidate"])
        for name, entry in receipt["components"].items()
        for row in entry["rows"]
        if row["result"] != "passed"
    }
    assert failed <= open_checks(path.with_suffix(".open")), (
        "every failure is named, with what became of it, in the file beside the receipt"
    )
    old = receipts.stale(receipt)
    if old:
        warnings.warn(f"receipts/{path.name} is older than the code of {', '.join(old)}", stacklevel=1)


def open_checks(path):
    """component.function.check implementation: reason, a line each.

    A check that was not finished is known whole, others by their domain, the last part.
    """
    found = set()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if not line.startswith("#"):
            check, reason = line.split(": ", 1)
            key, implementation = check.split(" ")
            assert reason
            component, function, *parts = key.split(".")
            found.update((component, function, domain, implementation) for domain in (parts[-1], ".".join(parts)))
    return found


def test_there_is_a_receipt_of_a_gpu():
    assert any(receipts.read(path)["environment"]["capability"] for path in COMMITTED)


def test_what_is_called_verified_on_a_gpu_has_passed_there():
    passed, faults = set(), set()
    for path in COMMITTED:
        receipt = receipts.read(path)
        if receipt["environment"]["capability"] == "9.0":
            passed |= {
                (f"{name}.{row['function']}", row["backend"])
                for name, entry in receipt["components"].items()
                for row in entry["rows"]
                if row["result"] == "passed"
            }
            beside = path.with_suffix(".open")
            for line in beside.read_text(encoding="utf-8").splitlines() if beside.exists() else ():
                check, _, reason = line.partition(": ")
                if reason.startswith("fault of dsv4"):
                    key, backend = check.split(" ")
                    faults.add((".".join(key.split(".")[:2]), backend))
    claimed = {(function.rstrip("_"), row.backend) for function, rows in dispatch.TABLES.items() for row in rows if "SM90" in row.verified}
    assert claimed <= passed
    assert not claimed & faults


def outcome(**changes):
    row = {"output": "result", "level": "E0", "domain": "drawn", "cases": 8, "max_ulp": 0, "share": None}
    base = {"component": "codecs", "function": "decode_e4m3", "check": "drawn", "candidate": "eager", "backend": "eager", "version": "1"}
    return {
        **base,
        "device": "cpu",
        "result": "passed",
        "rows": [row],
        "refused": 0,
        "message": "",
        "spec": None,
        "seconds": 0.5,
        **changes,
    }


def test_a_receipt_is_stale_when_a_source_changes(monkeypatch, tmp_path):
    receipt = receipts.make([outcome(), outcome(component="scales", function="pack_ue8m0")], profile="ci", where={})
    assert receipts.stale(receipt) == []
    files = {path.relative_to(receipts.ROOT).as_posix() for path in receipts.sources("codecs")}
    assert {"reference/codecs.py", "fast/codecs.py", "parity/components/codecs.py", "formats.py", "checks.py"} <= files
    assert not any(name.startswith("reference/scales") for name in files)
    receipt["components"]["scales"]["sources"] = "0" * 64
    assert receipts.stale(receipt) == ["scales"]


def test_kernels_and_what_a_contract_imports_are_sources():
    """Kernels are imported when one is launched, by a name that a call gets."""
    behind = {path.relative_to(receipts.ROOT).as_posix() for component in contracts.components() for path in receipts.sources(component)}
    kernels = {path.relative_to(receipts.ROOT).as_posix() for path in receipts.ROOT.glob("fast/kernels/*.py")}
    assert kernels - behind == {"fast/kernels/__init__.py"}
    assert {f"fast/adapters/{name}.py" for name in ("deepgemm_mqa", "deepgemm_linear", "flashinfer_mla", "flashmla")} <= behind
    of = {path.relative_to(receipts.ROOT).as_posix() for path in receipts.sources("attention")}
    assert {"fast/kernels/attention_hopper.py", "parity/attention_inputs.py", "parity/attention_bounds.py", "parity/invariants.py"} <= of
    assert not any("linear" in name or "boundary" in name for name in of if name.startswith("fast/kernels"))


def test_what_a_candidate_refuses_is_not_claimed():
    receipt = receipts.make([outcome(result="refused", message="not installed")], profile="ci", left_out=["something"], where={})
    assert receipt["not_claimed"] == ["codecs.decode_e4m3.drawn (eager): not installed", "something"]
    assert receipt["components"]["codecs"]["rows"] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda receipt: receipt.pop("profile"), "exactly the keys"),
        (lambda receipt: receipt.update(receipt=2), "version 1"),
        (lambda receipt: receipt["components"]["codecs"]["rows"][0].pop("cases"), "component codecs must have sources, and rows with"),
    ],
)
def test_malformed_receipts_are_refused(tmp_path, change, words):
    receipt = receipts.make([outcome()], profile="ci", where={})
    receipts.write(tmp_path / "good.json", receipt)
    assert receipts.read(tmp_path / "good.json") == receipt
    change(receipt)
    tmp_path.joinpath("bad.json").write_text(json.dumps(receipt))
    with pytest.raises(ValueError, match=words):
        receipts.read(tmp_path / "bad.json")
