"""Every text that the page itself brings: starting prompts, race prompts, and what brought visitors ask."""

from demo.panel import STATIC

TWO_CLOCKS = (STATIC / "two_clocks.txt").read_text(encoding="utf-8")

SYSTEM_PROMPT = "You are a helpful assistant. Answer in plain, short sentences."

STARTERS = {
    "Why a cache?": "Why does a language model need a KV cache? Explain it to a curious child.",
    "A 400-word story": "Continue this story in about 400 words: The lighthouse stood at the edge of the "
    "world, and each evening the keeper climbed the stair with a lamp in one hand and a letter in the other.",
    "A long page": f"Here is a story.\n\n{TWO_CLOCKS}\n\nWho is in it, and what happens to them?",
    "A haiku": "Write a haiku about memory.",
}

RACES = {
    "A lighthouse": "The lighthouse stood at the edge of the world, and each evening the keeper",
    "Two clocks": TWO_CLOCKS[: TWO_CLOCKS.index("In the autumn")].strip(),
}
LONG_RACE = "A whole page"

EXAMPLE_QUESTION = "Describe the city of Lisbon."
EXAMPLE_SCHEMA = """{
  "type": "object",
  "properties": {
    "name": {"type": "string", "maxLength": 40},
    "country": {"type": "string", "maxLength": 40},
    "population": {"type": "integer", "minimum": 0, "maximum": 50000000},
    "known_for": {
      "type": "array", "minItems": 1, "maxItems": 3,
      "items": {"type": "string", "minLength": 4, "maxLength": 60}
    }
  },
  "required": ["name", "country", "population", "known_for"],
  "additionalProperties": false
}"""

VISITORS = (
    "Tell me a short story about a clockmaker.",
    "List five facts about the sea.",
    "Explain how bread rises.",
    "Write a letter to a friend who moved to another city.",
    "What should I see in Lisbon in one day?",
    "Describe a thunderstorm to somebody who has never seen rain.",
    "How do bees find their way home?",
    "Give me a simple recipe for lentil soup.",
    "Why is the sky dark at night?",
    "Write a dialogue between the moon and a street lamp.",
)


def public_prompts() -> list[list[dict[str, str]]]:
    """The chats that a press of a button begins: whoever comes first computes them for everybody."""
    system = {"role": "system", "content": SYSTEM_PROMPT}
    starters = [[system, {"role": "user", "content": text}] for text in STARTERS.values()]
    return starters + [[{"role": "user", "content": text}] for text in VISITORS]


def race_prompts(max_race_tokens: int) -> dict[str, str]:
    """The race's presets; where long races are allowed, one is long enough to matter on a GPU."""
    if max_race_tokens < 2500:
        return RACES
    return {**RACES, LONG_RACE: "\n\n".join([TWO_CLOCKS] * max(1, min(6000, max_race_tokens - 500) // 1100))}
