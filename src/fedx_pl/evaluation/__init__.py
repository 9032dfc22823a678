"""How good a frozen encoder is: kNN and linear probe on cached features."""
