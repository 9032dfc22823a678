"""How fast a federated round is: against the authors' procedure, against a rival and against the hardware."""
