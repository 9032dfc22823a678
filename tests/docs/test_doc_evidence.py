"""Numbers in README.md and experiments/README.md equal those in the generated report."""

import re

import pytest
from doc_blocks import ROOT

METHODS = ("FedSimCLR", "FedMoCo", "FedBYOL", "FedProtoCL", "FedU")


def cells(line: str) -> list[str]:
    return [cell.strip().replace("**", "") for cell in line.strip().strip("|").split("|")]


def main_table(profile: str) -> tuple[dict[tuple[str, str], list[str]], dict[str, list[str]]]:
    """Parses a report.

    Gives the rows of the main table by (method, variant), and FedX's difference and verdict by
    method.
    """
    report = (ROOT / "experiments" / "results" / profile / "report.md").read_text()
    accuracies, _, rest = report.partition("## The methods with and without FedX")[2].partition(
        "### Differences"
    )
    table = [cells(line) for line in accuracies.splitlines() if line.startswith("| Fed")]
    differences = {
        row[1]: row[3:5]
        for row in map(cells, rest.partition("<details>")[0].splitlines())
        if row[0] == "CIFAR-10" and row[2] == "+ FedX"
    }
    return {(row[0], row[1]): row for row in table}, differences


def rows_of(page: str) -> list[list[str]]:
    return [row for row in map(cells, (ROOT / page).read_text().splitlines()) if row[0] in METHODS]


def test_the_first_table_is_the_cpu_report_s() -> None:
    columns, differences = main_table("cpu")
    levels = {key: row[2] for key, row in columns.items()}
    shown = {row[0]: row[1:] for row in rows_of("README.md")}
    longer = {row[0]: row[1:] for row in rows_of("experiments/README.md") if len(row) == 7}
    assert list(shown) == list(longer) == ["FedSimCLR", "FedBYOL"]
    for method, (plain, fedx, difference) in shown.items():
        assert [plain, fedx] == [levels[method, "B=64"], levels[method, "+ FedX"]]
        assert difference == re.sub(r" \(\d+\)$", "", differences[method][0])
        assert longer[method][:3] == [levels[method, "B=128"], plain, fedx]
        assert longer[method][3] == f"{difference}, {differences[method][1]}"


def test_the_table_of_five_methods_is_the_mini_report_s() -> None:
    columns, differences = main_table("mini")
    levels = {key: row[2] for key, row in columns.items()}
    rows = rows_of("experiments/README.md")
    shown = {row[0]: row[1:] for row in rows if len(row) == 5}
    for method in METHODS:
        plain, fedx, difference, verdict = shown[method]
        assert [plain, fedx] == [levels[method, "B=64"], levels[method, "+ FedX"]]
        assert difference == re.sub(r" \(\d+\)$", "", differences[method][0])
        assert verdict == differences[method][1]
    for method, plain, fedx, difference in (
        row for row in rows if len(row) == 4
    ):  # Fashion-MNIST, one seed
        row = {variant: fields[5] for (name, variant), fields in columns.items() if name == method}
        assert [f"{plain} (1)", f"{fedx} (1)"] == [row["B=64"], row["+ FedX"]]
        assert float(difference) == pytest.approx(float(fedx) - float(plain))


def test_tests_that_the_threats_name_exist() -> None:
    """The table of threats names a test for each claim."""
    tests = {file: file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    page = (ROOT / "docs" / "federation.md").read_text()
    named = re.findall(r"`(?:([a-z_/]+\.py)::)?(test_[a-z0-9_]+)`", page)
    assert len(named) > 30
    for file, name in named:
        homes = [home for home, text in tests.items() if f"def {name}(" in text]
        assert any(home.as_posix().endswith(f"/{file}") or not file for home in homes), name
