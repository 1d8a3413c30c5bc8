"""Ask a person by HTTP POST, and receive the answer by HTTP. Run it as it is: its "person" approves at once."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anyio
import httpx
from own_orchestrator import PLAN, work

from replanning import CallbackGate, ReplanningEngine, Settings


async def ask(question):
    """The gate: post the question to a web hook, then wait; the answer arrives through `Door`."""
    text = {"id": question.id, "text": question.text, "diffs": question.diffs}
    async with httpx.AsyncClient() as client:
        await client.post(f"{URL}/ask", json=text)
    await anyio.sleep_forever()


class Door(BaseHTTPRequestHandler):
    """POST /answer with {"id", "verdict", "by"} answers a question; POST /ask plays the person."""

    def do_POST(self):
        """Receive a question, or an answer."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        if self.path == "/answer":
            ENGINE.answer(body["id"], body["verdict"], by=body["by"])  # from the server's thread
        else:
            print(f"{body['text']}\n{body['diffs'][0]}")
            answer = {"id": body["id"], "verdict": "approve", "by": "ada"}
            threading.Thread(
                target=httpx.post, args=(f"{URL}/answer",), kwargs={"json": answer}
            ).start()

    def log_message(self, *args):
        """Write no log."""


async def main():
    """Run a plan; a person must approve every change."""
    result = await ENGINE.execute(PLAN, work)
    print(result.status, result.outputs)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
    URL = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = Settings.model_validate({"alternatives": {"require_approval": True}})
    ENGINE = ReplanningEngine(gate=CallbackGate(ask), settings=settings)
    anyio.run(main)
    server.shutdown()
