"""The numbers in README.md and experiments/README.md are those of the report, which is made from the result files."""

import re

import pytest
from doc_blocks import ROOT

METHODS = ("FedSimCLR", "FedMoCo", "FedBYOL", "FedProtoCL", "FedU")


def cells(line: str) -> list[str]:
    return [cell.strip().replace("**", "") for cell in line.strip().strip("|").split("|")]


@pytest.mark.parametrize("page", ["README.md", "experiments/README.md"])
def test_the_table_is_the_report_s(page: str) -> None:
    report = (ROOT / "experiments" / "results" / "mini" / "report.md").read_text()
    accuracies, _, rest = report.partition("## The methods with and without FedX")[2].partition("### Differences")
    table = [cells(line) for line in accuracies.splitlines() if line.startswith("| Fed")]
    columns = {(row[0], row[1]): row for row in table}
    levels = {key: row[2] for key, row in columns.items()}
    differences = {
        row[1]: row[3:5]
        for row in map(cells, rest.partition("<details>")[0].splitlines())
        if row[0] == "CIFAR-10" and row[2] == "+ FedX"
    }
    rows = [row for row in map(cells, (ROOT / page).read_text().splitlines()) if row[0] in METHODS]
    shown = {row[0]: row[1:] for row in rows if len(row) == 5}
    for method in METHODS:
        plain, fedx, difference, verdict = shown[method]
        assert [plain, fedx] == [levels[method, "B=64"], levels[method, "+ FedX"]]
        assert difference == re.sub(r" \(\d+\)$", "", differences[method][0])
        assert verdict == differences[method][1]
    for method, plain, fedx, difference in (row for row in rows if len(row) == 4):  # Fashion-MNIST, one seed
        row = {variant: fields[5] for (name, variant), fields in columns.items() if name == method}
        assert [f"{plain} (1)", f"{fedx} (1)"] == [row["B=64"], row["+ FedX"]]
        assert float(difference) == pytest.approx(float(fedx) - float(plain))
