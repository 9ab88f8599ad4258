"""Federated training: the round loop, the interface of a federation, and payloads as bytes."""
