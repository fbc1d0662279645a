"""The pages: links resolve, every public function is on its component's page, ladder and options are the code's, the site builds."""

import argparse
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4.parity import contracts, mutants, plugin
from dsv4.parity.levels import Level

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
COMPONENTS = sorted(page.stem for page in (DOCS / "components").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_inside_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_every_image_is_shown_somewhere():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [image.name for image in (DOCS / "images").glob("*.png") if f"images/{image.name})" not in text] == []


def test_every_component_has_a_page_and_every_page_is_in_the_menu():
    assert list(contracts.components()) == COMPONENTS
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert sorted(re.findall(r"[\w/]+\.md", menu)) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_public_function_is_named_on_its_page(component):
    text = (DOCS / "components" / f"{component}.md").read_text(encoding="utf-8")
    public = importlib.import_module(f"dsv4.reference.{component}").__all__
    assert public
    assert [name for name in public if f"`{name}`" not in text] == []
    assert f"::: dsv4.reference.{component}" in text
    assert f"| `{component}` |" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_ladder_is_the_code_s():
    rows = dict(re.findall(r"^\| (E\d) \| (.*) \|$", (DOCS / "concepts.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert {level: claim.replace("\\|", "|") for level, claim in rows.items()} == {str(level): level.claim for level in Level}


def test_the_options_are_the_plugin_s():
    parser = argparse.ArgumentParser()

    class Pytest:
        def getgroup(self, *_):
            group = parser.add_argument_group()
            group.addoption = group.add_argument
            return group

    plugin.pytest_addoption(Pytest())
    options = set(re.findall(r"--dsv4-[\w-]+", parser.format_help()))
    assert set(re.findall(r"^\| `(--dsv4-[\w-]+)`", (DOCS / "own_kernel.md").read_text(encoding="utf-8"), re.MULTILINE)) == options


def test_reported_bugs_and_their_tests():
    rows = re.findall(r"^\| ([A-Z]{2}-\d{2}) \|.*\| (.*) \|$", (DOCS / "cases.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = {(case, name) for case, names in rows for name in re.findall(r"`(test_\w+)`", names)}
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py")]
    names = [name for source in sources for name in re.findall(r"^def (test_[a-z]{2}_\d\d_\w+)", source, re.MULTILINE)]
    assert listed == {(case, name) for name in names for case in named_cases(name)}
    assert len(rows) == len({case for case, _ in rows})
    seeded = [
        mutant.source for name in contracts.components() for one in contracts.for_component(name) for mutant in mutants.for_contract(one)
    ]
    assert {source for source in seeded if re.fullmatch(r"[A-Z]{2}-\d{2}", source)} <= {case for case, _ in rows}


def named_cases(name):
    """A test's cases: `test_cp_09_and_dt_01_...` is of CP-09 and of DT-01."""
    (first,) = re.findall(r"^test_((?:[a-z]{2}_\d\d_and_)*[a-z]{2}_\d\d)_", name)
    return [case.upper().replace("_", "-") for case in first.split("_and_")]


def test_the_site_builds(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    for component in COMPONENTS:
        page = (tmp_path / "site" / "components" / component / "index.html").read_text(encoding="utf-8")
        public = importlib.import_module(f"dsv4.reference.{component}").__all__
        assert [name for name in public if f'id="dsv4.reference.{component}.{name}"' not in page] == []
