"""The pytest plugin: options, one test for each check of each candidate, the report, the receipt.

Registered through the pytest11 entry point, so it is loaded in every pytest run of every project where dsv4 is installed: it imports
neither torch nor Hypothesis until tests of dsv4.parity are collected, and leaves every other test alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dsv4.parity import report

if TYPE_CHECKING:
    from dsv4.parity.collect import ParityCase

HERE = Path(__file__).parent
WRITTEN_EVERY = 20.0  # seconds of a run, a receipt
COMPONENTS = tuple(sorted(path.stem.removeprefix("test_") for path in HERE.glob("test_*.py")))
PROFILE_NAMES = ("smoke", "ci", "dev", "soak")
PROPERTY = "dsv4_parity"
FIXTURE = "parity_case"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of design and documentation: `pytest --help` shows them under dsv4."""
    group = parser.getgroup("dsv4", "dsv4.parity")
    add = group.addoption
    add(
        "--dsv4-impl",
        action="append",
        default=[],
        metavar="COMPONENT[.FUNCTION]=MODULE[:CALLABLE]",
        help="hold this implementation to the contract (repeatable)",
    )
    add("--dsv4-backend", metavar="NAME", help="hold this backend of dsv4.fast to it instead of what is picked here")
    add("--dsv4-device", metavar="DEVICE", help="where to run: cpu, cuda, cuda:1 (default: cuda if there is one)")
    add("--dsv4-component", action="append", default=[], metavar="NAME", help="only this component (repeatable)")
    add("--dsv4-profile", choices=PROFILE_NAMES, default="smoke", help="how hard to look: 8, 40, 100 or 2000 cases of each drawn check")
    add("--dsv4-report", metavar="FILE", help="write a report: .json, .md or .html")
    add("--dsv4-receipt", metavar="FILE", help="write a receipt (JSON)")
    add("--dsv4-xfail", metavar="FILE", help="known failures, a line each: NODEID or component.function.check, then the name of its issue")


def pytest_configure(config: pytest.Config) -> None:
    """Check the options that can be checked without torch, and start to collect outcomes."""
    target = config.getoption("--dsv4-report")
    if target and Path(target).suffix not in (".json", ".md", ".html"):
        raise pytest.UsageError(f"--dsv4-report {target}: must end in .json, .md or .html")
    config.addinivalue_line("markers", "dsv4_parity: a check of dsv4.parity")
    session = _Session(config)
    config.pluginmanager.register(session, "dsv4-parity-session")


class _Session:
    """What one pytest process knows of its run."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.outcomes: list[report.Data] = []
        self.left_out: set[str] = set()
        target = config.getoption("--dsv4-xfail")
        self.known = _known_failures(Path(target)) if target else {}
        self.asked = _components(config)
        self._written = time.monotonic()

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out the test files of components that were not asked for."""
        stem = collection_path.stem.removeprefix("test_")
        return True if collection_path.parent == HERE and stem in COMPONENTS and stem not in self.asked else None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each check of each candidate of the module's COMPONENT."""
        if FIXTURE in metafunc.fixturenames:
            cases, left_out = self._cases(metafunc.module.COMPONENT)
            self.left_out.update(left_out)
            metafunc.parametrize(FIXTURE, [pytest.param(case, id=case.label) for case in cases])

    def _cases(self, component: str) -> tuple[list[ParityCase], list[str]]:
        try:
            from dsv4.parity import collect, contracts, profiles
        except ImportError as error:
            raise pytest.Collector.CollectError(f"dsv4.parity needs what the extra dsv4[parity] installs: {error}") from error
        profiles.register()
        option = self.config.getoption
        here = str(self.config.invocation_params.dir)
        if here not in sys.path:  # as python -m pytest does, so that --dsv4-impl finds a module lying there
            sys.path.insert(0, here)
        selection = collect.Selection(option("--dsv4-impl"), option("--dsv4-backend"), option("--dsv4-device"), option("--dsv4-profile"))
        try:
            strangers = collect.unmatched(selection.impls)
            if strangers:
                functions = [contract.function for contract in contracts.for_component(component)]
                raise LookupError(f"--dsv4-impl {strangers[0]!r}: no function with a contract; {component} has {', '.join(functions)}")
            return selection.cases(component)
        except LookupError as error:
            raise pytest.Collector.CollectError(str(error.args[0])) from error

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mark what --dsv4-xfail names; with strict=True an unexpected pass fails."""
        unused = set(self.known)
        for item in items:
            case = _case(item)
            if case is None:
                continue
            item.add_marker(pytest.mark.dsv4_parity)
            for name in self.known:
                if name == case.key or item.nodeid == name or item.nodeid.endswith(f"/{name}"):
                    item.add_marker(pytest.mark.xfail(reason=self.known[name], strict=True))
                    unused.discard(name)
        self.left_out.update(f"--dsv4-xfail {name}: names no check of this run" for name in unused)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Let the outcome of a parity test travel with its report."""
        try:
            return (yield)
        finally:
            outcome = item.stash.get(OUTCOME, None)
            if outcome is not None:
                item.user_properties.append((PROPERTY, json.dumps(outcome)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Leave captured logs out of a parity failure: compilers write thousands of lines there, and the message says what happened."""
        made = yield
        if _case(item) is not None:
            made.sections = [section for section in made.sections if "log" not in section[0]]
        return made

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take outcomes from reports, wherever they ran."""
        if report.when == "call":
            self.outcomes += [json.loads(str(value)) for name, value in report.user_properties if name == PROPERTY]
            receipt = self.config.getoption("--dsv4-receipt")
            if receipt and not hasattr(self.config, "workeroutput") and time.monotonic() - self._written > WRITTEN_EVERY:
                self._write_receipt(Path(receipt), f"what the run had left after {len(self.outcomes)} checks: it is not at its end")
                self._written = time.monotonic()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """What a pytest-xdist worker left out."""
        self.left_out.update(getattr(node, "workeroutput", {}).get(PROPERTY, []))

    def pytest_sessionfinish(self) -> None:
        """Write what was asked for; in a pytest-xdist worker, hand over instead."""
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[PROPERTY] = sorted(self.left_out)
            return
        if target := self.config.getoption("--dsv4-report"):
            from dsv4.parity import receipts

            report.write(Path(target), self.outcomes, receipts.environment(self.config.getoption("--dsv4-device")))
        if target := self.config.getoption("--dsv4-receipt"):
            self._write_receipt(Path(target))

    def _write_receipt(self, path: Path, *left_out: str) -> None:
        """What has been found so far, in the place of what was written before."""
        from dsv4.parity import receipts

        where, profile = receipts.environment(self.config.getoption("--dsv4-device")), self.config.getoption("--dsv4-profile")
        receipts.write(path, receipts.make(self.outcomes, profile=profile, left_out={*self.left_out, *left_out}, where=where))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The table, unless -q or --no-summary asks for less."""
        if self.outcomes and terminalreporter.verbosity >= 0:
            width = terminalreporter._tw.fullwidth
            terminalreporter.section("dsv4 parity")
            terminalreporter.write_line(report.pretty(report.digest(self.outcomes), report.DIGEST, width=width))
            terminalreporter.write_line(report.summary(self.outcomes))


OUTCOME = pytest.StashKey[report.Data]()


@pytest.fixture
def run_parity(request: pytest.FixtureRequest) -> Any:
    """Runs a case; fails with its message, skips where the candidate refuses every case."""

    def run(case: ParityCase) -> None:
        __tracebackhide__ = True
        try:
            outcome = case.run()
        except Exception as error:
            request.node.stash[OUTCOME] = report.as_data(case.crashed(error))
            raise
        request.node.stash[OUTCOME] = report.as_data(outcome)
        if outcome.result == "refused":
            pytest.skip(outcome.message or f"{case.candidate.name} refuses every case of {case.key}")
        if outcome.result == "failed":
            pytest.fail(outcome.message, pytrace=False)

    return run


def _case(item: pytest.Item) -> ParityCase | None:
    spec = getattr(item, "callspec", None)
    return spec.params.get(FIXTURE) if spec is not None else None


def _components(config: pytest.Config) -> set[str]:
    """The components that --dsv4-component and --dsv4-impl leave to be tested."""
    named = {"--dsv4-component": config.getoption("--dsv4-component"), "--dsv4-impl": config.getoption("--dsv4-impl")}
    asked = set(COMPONENTS)
    for option, entries in named.items():
        stems = {entry.partition("=")[0].partition(".")[0] for entry in entries}
        if not stems <= set(COMPONENTS):
            raise pytest.UsageError(f"{option} {sorted(stems - set(COMPONENTS))[0]}: no contract; components: {', '.join(COMPONENTS)}")
        asked = asked & stems if stems else asked
    return asked


def _known_failures(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise pytest.UsageError(f"--dsv4-xfail {path}: {error}") from error
    known = {}
    for number, line in enumerate(lines, 1):
        name, *issue = line.split(maxsplit=1)[:2] if line.strip() and not line.lstrip().startswith("#") else ("", "")
        if name and not issue:
            raise pytest.UsageError(
                f"--dsv4-xfail {path}:{number}: {name!r} names no issue; write NODEID-or-component.function.check, then the issue"
            )
        if name:
            known[name] = issue[0]
    return known
