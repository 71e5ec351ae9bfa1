"""Shows a store of your own: skills in one JSON file, for the built-in tools that write and find them."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import anyio

from toolcell import ToolRegistry, UsageError
from toolcell.builtin import HashEmbeddings, Scored, Skill, Skills
from toolcell.support.embeddings import nearest


class JsonSkills:
    """A SkillStore. Each change replaces the file, so a crash leaves the old one or the new one."""

    def __init__(self, path: Path) -> None:
        self.path, self.provider = path, ""
        self.skills: dict[str, Skill] = {}

    async def init(self) -> None:
        if self.path.exists():
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            self.provider = kept["provider"]
            self.skills = {each["id"]: Skill(**each) for each in kept["skills"]}

    async def close(self) -> None:
        """Nothing is held open."""

    async def use_embeddings(self, name: str, dimensions: int) -> None:
        provider = f"{name}, {dimensions} dimensions"
        if self.provider not in ("", provider):
            raise UsageError(f"the vectors in {self.path} are those of {self.provider}, not of {provider}")
        self.provider = provider

    def _save(self) -> None:
        kept = {"provider": self.provider, "skills": [asdict(each) for each in self.skills.values()]}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(kept), encoding="utf-8")
        new.replace(self.path)

    async def create_skill(self, skill: Skill) -> None:
        if skill.id in self.skills:
            raise UsageError(f"there is a skill {skill.id} already")
        self.skills[skill.id] = skill
        self._save()

    async def get_skill(self, skill_id: str) -> Skill | None:
        return self.skills.get(skill_id)

    async def list_skills(self) -> list[Skill]:
        return [self.skills[skill_id] for skill_id in sorted(self.skills)]

    async def update_skill(self, skill: Skill) -> bool:
        if skill.id not in self.skills:
            return False
        self.skills[skill.id] = skill
        self._save()
        return True

    async def delete_skill(self, skill_id: str) -> bool:
        if self.skills.pop(skill_id, None) is None:
            return False
        self._save()
        return True

    async def search_skills(self, embedding: Sequence[float], top_k: int) -> list[Scored[Skill]]:
        skills = list(self.skills.values())
        found = nearest(embedding, (each.embedding or () for each in skills))
        return [Scored(skills[at], score) for at, score in found[:top_k]]


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = JsonSkills(Path(folder, "skills.json"))
        await store.init()
        registry = ToolRegistry([Skills(store, HashEmbeddings())])
        for name, description in [("invoice", "Write an invoice for a customer"), ("release", "Publish a new version")]:
            await registry.dispatch("skill_create", {"name": name, "description": description, "instructions": "..."})

        again = JsonSkills(store.path)
        await again.init()
        found = await ToolRegistry([Skills(again, HashEmbeddings())]).dispatch("skill_search", {"query": "an invoice"})
        print([each["name"] for each in found.value])


if __name__ == "__main__":
    anyio.run(main)
