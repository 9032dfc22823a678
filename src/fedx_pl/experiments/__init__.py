"""Experiments behind tables and figures: definitions, sweeps, results and the report."""
