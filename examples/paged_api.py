"""Reads all pages of an HTTP API; only the first response states their number. Run it as it is.

Each page is a task. The first request for one of them gets a 503 and is retried; the others are not repeated.
"""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import anyio
import httpx

from replanning import Plan, ReplanningEngine, tool

PAGES = {1: ["cup", "plate"], 2: ["fork", "spoon"], 3: ["knife", "ladle"], 4: ["whisk"]}
BUSY = [3]

PLAN = """
goal: {objective: Read all articles}
parameters: {url: string}
tasks:
  - {id: first, tool: get_page, arguments: {url: "${parameters.url}", page: 1}}
  - {id: further, tool: further_pages, arguments: {first: "${first.output}"}, depends_on: [first]}
  - id: others
    for_each: ${further.output}
    max_items: 100
    max_parallel: 2
    tool: get_page
    arguments: {url: "${parameters.url}", page: "${item}"}
    depends_on: [further]
  - {id: articles, tool: join, arguments: {first: "${first.output}", others: "${others.output}"}, depends_on: [others]}
"""


@tool(retry={"delay": 0})
async def get_page(url: str, page: int) -> dict:
    """Request a page."""
    async with httpx.AsyncClient() as client:
        answer = await client.get(url, params={"page": page})
    return answer.raise_for_status().json()


@tool
def further_pages(first: dict) -> list[int]:
    """Return the numbers of the pages after the first."""
    return list(range(2, first["pages"] + 1))


@tool
def join(first: dict, others: list[dict]) -> list[str]:
    """Put the articles of all pages together."""
    articles = []
    for page in [first, *others]:
        articles += page["articles"]
    return articles


class Articles(BaseHTTPRequestHandler):
    """Server of the API."""

    def do_GET(self):
        """Respond with a page, and the number of pages."""
        page = int(self.path.partition("page=")[2])
        print(f"asked for page {page}\n", end="")  # at once, as other threads print as well
        if page in BUSY:
            BUSY.remove(page)
            self.send_error(503)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        answer = {"articles": PAGES[page], "pages": len(PAGES)}
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments):
        """Write no log."""


async def main(url):
    """Read all pages."""
    plan = Plan.parse(PLAN).with_parameters({"url": url})
    result = await ReplanningEngine().execute(plan, tools=[get_page, further_pages, join])
    print(result.status, result.outputs["articles"])


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), Articles) as server:
        Thread(target=server.serve_forever).start()
        anyio.run(main, f"http://127.0.0.1:{server.server_port}/articles")
        server.shutdown()
