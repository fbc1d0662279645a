"""Committed receipts can be read, and say whether they are older than the code they speak for."""

import json
import warnings
from pathlib import Path

import pytest

from dsv4.parity import receipts

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = sorted(ROOT.joinpath("receipts").glob("*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=[path.stem for path in COMMITTED])
def test_a_committed_receipt(path):
    receipt = receipts.read(path)
    assert receipt["components"]
    assert all(row["result"] == "passed" for entry in receipt["components"].values() for row in entry["rows"])
    old = receipts.stale(receipt)
    if old:
        warnings.warn(f"receipts/{path.name} is older than the code of {', '.join(old)}", stacklevel=1)


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
