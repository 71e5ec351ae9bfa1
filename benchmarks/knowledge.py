"""Measure the built-in knowledge tools: how well each search finds known answers, and how fast a large store is.

    python -m benchmarks.knowledge [--chunks N] [--dimensions N] [--json]

Quality: notes are generated from a fixed seed, each about one machine. Every question has one right note. The
questions are of three kinds: an exact code, a description in other forms of the words and with slips of the pen, and
both. Speed: documents of a hundred chunks each go into a `SqliteStore`; then it is searched for chunks at random
places.
CPU time is beside the wall time, for machines that are busy with other things.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import numpy

from toolcell.builtin import Chunk, Document, HashEmbeddings, Retriever, SqliteStore, index_document

PARTS = [
    "pump", "valve", "boiler", "turbine", "compressor", "conveyor", "sensor", "gearbox", "furnace", "chiller",
    "crane", "mixer", "press", "kiln",
]  # fmt: skip
STATES = [
    "leaking", "vibrating", "overheating", "rattling", "corroded", "blocked", "stalling", "drifting",
    "smoking", "frozen", "cracked",
]  # fmt: skip
PLACES = [
    "harbour", "quarry", "brewery", "hospital", "station", "bakery", "foundry", "greenhouse", "library",
    "shipyard", "airport", "dairy",
]  # fmt: skip
CURES = [
    "replaced",
    "lubricated",
    "tightened",
    "cleaned",
    "recalibrated",
    "welded",
    "flushed",
    "rewired",
    "insulated",
    "balanced",
]
FORMS = ("", "s", "ed", "ing", "er")
SAMPLE = 2000
KINDS = ("code", "described", "both")


def notes(count: int, chance: random.Random) -> list[tuple[str, dict[str, str]]]:
    """Return notes, each with the facts in it."""
    made = []
    for number in range(count):
        facts = {
            "code": f"{chance.choice('ABCDEFGH')}{chance.randrange(10**4, 10**5)}",
            "part": chance.choice(PARTS),
            "state": chance.choice(STATES),
            "place": chance.choice(PLACES),
            "cure": chance.choice(CURES),
            "name": "".join(chance.choice("bdfgklmnprstv") + chance.choice("aeiou") for _ in range(4)),
        }
        text = (
            f"Report {number}. Machine {facts['code']}, a {facts['part']} at the {facts['place']}, was"
            f" {facts['state']}. Technician {facts['name']} {facts['cure']} it and"
            " asked for another inspection of the machine."
        )
        made.append((text, facts))
    return made


def slip(word: str, chance: random.Random) -> str:
    """Return a word with another ending, or with two letters changed places."""
    if chance.random() < 0.5:
        return word.removesuffix("ing").removesuffix("ed") + chance.choice(FORMS)
    at = chance.randrange(1, max(2, len(word) - 2))
    return word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :]


def question(kind: str, facts: dict[str, str], chance: random.Random) -> str:
    """Return what somebody would ask about a note."""
    described = f"{slip(facts['name'], chance)} {slip(facts['part'], chance)} {slip(facts['place'], chance)}"
    match kind:
        case "code":
            return f"What happened to machine {facts['code']}?"
        case "described":
            return f"{described} {slip(facts['state'], chance)}"
        case _:
            return f"{facts['code']} {described}"


async def quality(count: int, asked: int) -> list[dict[str, Any]]:
    """Return recall of the first five and mean reciprocal rank of each search, for each kind of question."""
    chance = random.Random(20260101)
    embeddings, store, made = HashEmbeddings(256), SqliteStore(":memory:"), notes(count, chance)
    for text, _ in made:
        await index_document(store, embeddings, Document(content=text))
    questions = [(kind, *chance.choice(made)) for kind in KINDS for _ in range(asked)]
    rows: list[dict[str, Any]] = []
    searches = {"words": Retriever(keyword_weight=1.0), "vectors": Retriever(keyword_weight=0.0), "hybrid": Retriever()}
    asked_texts = [question(kind, facts, chance) for kind, _, facts in questions]
    for name, retriever in searches.items():
        places: dict[str, list[int]] = {kind: [] for kind in KINDS}
        for (kind, text, _), query in zip(questions, asked_texts, strict=True):
            found = [each.item.content for each in await retriever.search(store, embeddings, query, 10)]
            places[kind].append(found.index(text) + 1 if text in found else 0)
        everything = [place for kind in KINDS for place in places[kind]]
        row: dict[str, Any] = {"search": name}
        for kind, found_at in (*places.items(), ("all", everything)):
            row[f"{kind} recall@5"] = round(sum(0 < place <= 5 for place in found_at) / len(found_at), 3)
            row[f"{kind} MRR"] = round(sum(1 / place for place in found_at if place) / len(found_at), 3)
        rows.append(row)
    return rows


async def speed(chunks: int, dimensions: int) -> dict[str, Any]:
    """Return rates and times of one store."""
    chance = random.Random(1)
    embeddings = HashEmbeddings(dimensions)
    texts = [text for text, _ in notes(chunks, chance)]
    begun = time.process_time()
    await embeddings.embed(texts[:SAMPLE])
    embedding_s = time.process_time() - begun
    made = numpy.random.default_rng(1).standard_normal((chunks, dimensions)).tolist()
    with tempfile.TemporaryDirectory() as directory:
        store = SqliteStore(Path(directory) / "store.db")
        await store.use_embeddings(embeddings.name(), dimensions)
        wall, cpu = time.perf_counter(), time.process_time()
        for at in range(0, chunks, 100):
            document = Document(content=f"{at}", source="bench")
            parts = zip(texts[at : at + 100], made[at : at + 100], strict=True)
            await store.store_document(
                document, [Chunk(document_id=document.id, content=text, embedding=vector) for text, vector in parts]
            )
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        await store.search_chunks(made[0], 5)
        by_vector = await timed(lambda at: store.search_chunks(made[at], 15), chance, chunks)
        by_words = await timed(lambda at: store.search_chunks_keyword(texts[at][:60], 15), chance, chunks)
        size = sum(path.stat().st_size for path in Path(directory).iterdir())
        await store.close()
    return {
        "chunks": chunks,
        "dimensions": dimensions,
        "stored per second": round(chunks / wall),
        "stored per CPU second": round(chunks / cpu),
        "embedded per CPU second": round(SAMPLE / embedding_s),
        "file MB": round(size / 1e6),
        "vector search p50 ms": by_vector[0],
        "vector search p50 CPU ms": by_vector[1],
        "word search p50 ms": by_words[0],
        "word search p50 CPU ms": by_words[1],
    }


async def timed(search: Any, chance: random.Random, chunks: int) -> tuple[float, float]:
    """Return the median wall and CPU time of a search, in milliseconds."""
    elapsed, cpus = [], []
    for _ in range(30):
        at = chance.randrange(chunks)
        wall, cpu = time.perf_counter(), time.process_time()
        assert await search(at)
        elapsed.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return round(statistics.median(elapsed) * 1000, 1), round(statistics.median(cpus) * 1000, 1)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return both tables."""
    found: dict[str, Any] = {}
    if options.notes:
        found["quality"] = await quality(options.notes, options.questions)
    if options.chunks:
        found["speed"] = await speed(options.chunks, options.dimensions)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notes", type=int, default=1000, help="of the measure of quality; 0 leaves it out")
    parser.add_argument("--questions", type=int, default=100, help="of each kind")
    parser.add_argument("--chunks", type=int, default=100_000, help="of the measure of speed; 0 leaves it out")
    parser.add_argument("--dimensions", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = anyio.run(measure, options)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for row in found.get("quality", []):
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    for name, value in found.get("speed", {}).items():
        print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
