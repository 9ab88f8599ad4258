"""The round loop, what it needs of a federation, and payloads as bytes."""
