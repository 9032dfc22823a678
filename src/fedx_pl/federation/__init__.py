"""The rounds: choose clients, train each, fold their updates, measure and save."""
