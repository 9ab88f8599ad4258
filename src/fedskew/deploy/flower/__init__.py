"""All that knows Flower. These modules run in Flower's interpreter: they import it and the standard library only.

link      the server's side: Flower's SuperLink, closed but for its Fleet API, and the messages sent over it
carrier   a site's side: speaks the Fleet API as a SuperNode does, and fetches no code
keys      certificates and keys, by the library Flower brings
frames    how they talk with the fedskew process that started them: its pipe

Version 1.41.0 exactly: Flower's interfaces move with every release.
"""
