"""The experiments behind tables and figures: their definitions, sweeps over them, results and the report."""
