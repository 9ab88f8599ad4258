"""A federation over a network: the same methods, the same loop, the same bits. The network is Flower's."""
