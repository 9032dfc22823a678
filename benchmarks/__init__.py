"""Benchmarks of a federated round.

They compare it with the authors' procedure, with a rival and with what the hardware allows.
"""
