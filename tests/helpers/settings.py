"""Settings of methods that tests share."""

# settings under which a method is to be tried: small enough for a test, its own terms on
SMALL: dict[str, dict[str, object]] = {
    "fedpg": {"iterations": 3, "n_v": 3, "virtual_batch": 8, "generator_batch": 16},
    "fedgen": {"iterations": 3},
    "ccvr": {"each": 10, "epochs": 1},
    "fedddc": {"I": 3, "J": 3},
    "fedic": {"steps": 3, "distil_steps": 3},
    "feddf": {"steps": 3},
    "fedbe": {"M": 2, "epochs": 2},
    "creff": {"per_class": 5, "match": 3, "epochs": 2},
}
