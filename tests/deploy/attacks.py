# ruff: noqa: E402
# mypy: ignore-errors
"""Attacks on a real link over HTTP, in Flower's interpreter: run by test_network.py, which reads the JSON it prints.

python attacks.py FOLDER_OF_deploy/flower FOLDER_FOR_KEYS
"""

import json
import os
import socket
import sys
import threading
import time
import types
from pathlib import Path

package = types.ModuleType("flower_side")
package.__path__ = [sys.argv[1]]
sys.modules["flower_side"] = package

import httpx
import uvicorn
from flower_side import carrier, connections, frames, gate, keys, link
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.app.message.array import Array
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body, get_object_tree

connections.IDLE, connections.LOOK, gate.WAIT = 1.5, 0.1, 3.0
found = {"notes": []}


class Told:
    """The pipe to the fedskew process: a list of what was sent to it."""

    def __init__(self):
        self.events = []

    def send(self, header, blob=b""):
        self.events.append((header, bytes(blob)))

    def replies(self):
        return [(h, b) for h, b in self.events if h["event"] == "reply"]


def wait(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


folder = Path(sys.argv[2])
made = keys.make({"hosts": [], "sites": ["a", "b"], "days": 1})["sites"]
for name, pair in made.items():
    (folder / f"{name}.pub").write_text(pair["public"])
config = {
    "limit": 50_000_000,
    "grace": 30.0,
    "secure": True,
    "keys": str(folder),
    "sites": {n: p["public"] for n, p in made.items()},
}
server = link.Link(config, Told())
listener = connections.listen("127.0.0.1", 0)
port = listener.getsockname()[1]
settings = uvicorn.Config(server.app, http=connections.impatient_protocol(), ws="none", log_level="error")
running = uvicorn.Server(settings)
threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True).start()
wait(lambda: running.started)
threading.Thread(target=link.watch, args=(server,), daemon=True).start()


def site(name):
    return carrier.Carrier(
        {"server": f"127.0.0.1:{port}", "insecure": True, "ca": "", "key": made[name]["key"]}, Told()
    )


def outcome(call, *given):
    """What an attempt came to: its result, or the kind and text of its failure."""
    try:
        return str(call(*given))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def refused(call, request):
    """As `outcome`; notes the server's own words, which a site takes for a restarted server."""
    try:
        call(request)
    except httpx.HTTPStatusError as error:
        found["notes"].append(error.response.json()["refused"])
    return outcome(a.attempt, call, request)


a, b = site("a"), site("b")
a.join()
b.join()

# the task of the run does not expire while the server is suspended
found["task"] = (server.state.task_token_store[server.task].active_until.year > 2100,)

# messages to both
server.send(
    {"batch": 1, "to": [a.node.node_id, b.node.node_id], "headers": [{"n": 1}, {"n": 2}], "limit": 1000}, b"body"
)
for_a = a.client.PullMessages(PullMessagesRequest(node=a.node))
for_b = b.client.PullMessages(PullMessagesRequest(node=b.node))
message_b = message_from_proto(for_b.messages_list[0])
run, id_b = message_b.metadata.run_id, message_b.metadata.message_id

# node a: reads, confirms and answers the message of b
request = PullObjectRequest(node=a.node, run_id=run, object_id=id_b)
found["read"] = outcome(a.attempt, a.client.PullObject, request)
request = ConfirmMessageReceivedRequest(node=a.node, run_id=run, message_object_id=id_b)
a.client.ConfirmMessageReceived(request)
found["kept"] = id_b in server.state.object_store
forged = Message(frames.as_records({"forged": True}, b""), reply_to=message_b)
forged.metadata.__dict__["_message_id"] = forged.object_id
push = PushMessagesRequest(
    node=a.node,
    messages_list=[message_to_proto(remove_content_from_message(forged))],
    message_object_trees=[get_object_tree(forged)],
)
found["forged"] = refused(a.client.PushMessages, push)
found["other node"] = refused(a.client.PullMessages, PullMessagesRequest(node=b.node))

# a request again, and one with another body
sent = []
a.client._client.event_hooks = {"request": [sent.append]}
request = ConfirmMessageReceivedRequest(node=a.node, run_id=run, message_object_id=id_b)
a.client.ConfirmMessageReceived(request)
a.client._client.event_hooks = {}
first = sent[-1]
plain = httpx.Client()
again = plain.request("POST", first.url, headers=first.headers, content=first.content)
found["repeated"] = (again.status_code, again.text)
other = plain.request("POST", first.url, headers=dict(first.headers) | {"fedskew-nonce": "00"}, content=first.content)
found["new nonce"] = other.status_code
body = first.content[:-1] + bytes([first.content[-1] ^ 1])
found["changed"] = plain.request("POST", first.url, headers=first.headers, content=body).status_code
elsewhere = str(first.url).replace("confirm-message-received", "deactivate-node")
found["elsewhere"] = plain.request("POST", elsewhere, headers=first.headers, content=first.content).status_code

# node a names one chunk 1,500 times
honest = Array.deflate


def bomb(self):
    values = {"dtype": "uint8", "shape": [1], "stype": "bytes", "arraychunk_ids": [0] * 1500}
    return add_header_to_object_body(json.dumps(values).encode(), self)


Array.deflate = bomb
message_a = message_from_proto(for_a.messages_list[0])
frames.SMALL = 0
a.deliver(message_a, {}, b"x" * 500, seconds=0.0)
frames.SMALL = 1 << 20
Array.deflate = honest
wait(lambda: server.pipe.replies())
found["bomb"] = server.pipe.replies()[-1][0].get("lost")

# node b is honest, and more than it may send is refused
found["large"] = outcome(lambda: b.deliver(message_b, {"ok": 1}, bytes(6 << 20), seconds=0.0))
server.send({"batch": 2, "to": [b.node.node_id], "headers": [{"n": 3}], "limit": 1000}, b"")
message_b = message_from_proto(b.client.PullMessages(PullMessagesRequest(node=b.node)).messages_list[0])
b.deliver(message_b, {"ok": 1}, b"y" * 500, seconds=0.0)
wait(lambda: any("header" in h for h, _ in server.pipe.replies()))
found["honest"] = [(h["batch"], h["header"], len(blob)) for h, blob in server.pipe.replies() if "header" in h]
found["left"] = len(server.out)

# a request for messages waits for one, and takes none for a site that has gone
began, got = time.monotonic(), []


def pull():
    got.append(b.client.PullMessages(PullMessagesRequest(node=b.node)))


thread = threading.Thread(target=pull)
thread.start()
time.sleep(0.7)
found["waits"] = not got
server.send({"batch": 3, "to": [b.node.node_id], "headers": [{"n": 4}], "limit": 1000}, b"")
thread.join(2.0)
found["woken"] = len(got[0].messages_list) if got else 0
found["once more"] = len(b.client.PullMessages(PullMessagesRequest(node=b.node)).messages_list)  # it was not answered
gone = site("a")
gone.node = a.node
gone.client._client.timeout = 0.3
outcome(gone.client.PullMessages, PullMessagesRequest(node=a.node))
time.sleep(0.3)
server.send({"batch": 4, "to": [a.node.node_id], "headers": [{"n": 5}], "limit": 1000}, b"")
time.sleep(0.3)
stored = [server.state.message_ins_store[m] for m, s in server.out.items() if s.node == a.node.node_id]
found["kept for the next"] = [m.metadata.delivered_at for m in stored]

# connections that say nothing, or one byte at a time
silent = socket.create_connection(("127.0.0.1", port))
drip = socket.create_connection(("127.0.0.1", port))
ended, text = {}, b"POST /v1/fleet/pull-messages HTTP/1.1\r\nx-long: " + b"x" * 1000
for step in range(60):
    for name, connection in (("silent", silent), ("drip", drip)):
        connection.setblocking(False)
        try:
            if name == "drip":
                connection.send(text[step : step + 1])
            if connection.recv(1) == b"":
                ended[name] = True
        except BlockingIOError:
            pass
        except OSError:
            ended[name] = True
    time.sleep(0.1)
found["ended"] = sorted(ended)

# a revoked key
(folder / "b.pub").unlink()
wait(lambda: any("revoked" in h.get("text", "") for h, _ in server.pipe.events))
b.node = None
found["revoked"] = outcome(b.join)
found["others"] = outcome(a.attempt, a.client.PullMessages, PullMessagesRequest(node=a.node)).startswith(
    "messages_list"
)

# the server was suspended: its sites get their time back
for node in server.state.nodes.values():
    node.online_until = time.time() - 100
server.polled = time.time() - 75
before = len(server.pipe.replies())
time.sleep(0.3)
found["suspended"] = [h for h, _ in server.pipe.replies()[before:]]
print(json.dumps(found))
sys.stdout.flush()
os._exit(0)  # threads wait for requests
