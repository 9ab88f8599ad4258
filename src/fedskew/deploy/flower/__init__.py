"""The only modules that import Flower. They run in Flower's interpreter, so they import nothing else but the standard
library; fedskew starts them with `FlowerProcess`.

link      the server: Flower's SuperLink, of which only the Fleet API is open, and the messages sent over it
carrier   a site: uses the Fleet API as a SuperNode does, but downloads no code
gate      the check of every request to the server: its size, clock, key, signature, and that it is new
access    the check of what a node may do: its own messages, and replies within their limit
signing   the signature of a request
keys      certificates and keys, made with the package `cryptography` that Flower installs
superlink, connections, bell    Flower's own parts in the server; its sockets; waiting requests
verdicts  what a refusal of the server means for a site
frames    the messages between these processes and the fedskew process that started them

Only version 1.41.0 works: Flower's internal interfaces change with every release.
"""
