"""Flower's SuperLink: its application, the one run in it, and its nodes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from .gate import Gate, Guarded


def make_app(link: Guarded) -> Any:
    """Flower's application behind the gate."""
    from flwr.superlink.main import create_app

    app = create_app()
    app.state.enable_supernode_auth = link.secure
    app.add_middleware(Gate, link=link)
    return app


def start_run(state: Any) -> tuple[int, int]:
    """Start a run in the SuperLink's state; returns its number and that of its task."""
    from flwr.common.constant import NOOP_FLWR_AID, SUPERLINK_NODE_ID
    from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
    from flwr.supercore.task_identity import TaskIdentity

    run: int = state.create_run(
        "fedskew/fedskew", "1", "", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
    )
    task: int = state.get_run_info(run_ids=[run])[0].primary_task_id
    state.claim_task(task)
    state.activate_task(task)
    # Flower ends a run whose ServerApp sends no heartbeat for a minute, also if all of this was suspended.
    state.task_token_store[task].active_until += timedelta(days=100_000)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, SUPERLINK_NODE_ID, task
    return run, task


def register(state: Any, name: str, key: str) -> int:
    """Register the public key (PEM text) of a site; returns the number of its node."""
    from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, public_key_to_bytes

    try:
        public = public_key_to_bytes(bytes_to_public_key(key.encode()))  # normalised, as sites send it
        node: int = state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public, 0, name=name)
    except ValueError as error:
        raise ValueError(f"the public key of site {name} is invalid: {error}") from None
    return node


def unregister(state: Any, node: int) -> None:
    """Forget a node: its key is unknown from now on."""
    from flwr.common.constant import NOOP_FLWR_AID

    state.nodes[node].online_until = state.nodes[node].online_until or 0.0  # None before it joined
    state.delete_node(NOOP_FLWR_AID, node)
