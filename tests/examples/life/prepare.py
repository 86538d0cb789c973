"""A text to learn by heart, another to go on with, and a tokenizer made from the first."""

import this
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

zen = "".join(this.d.get(letter, letter) for letter in this.s)
Path("zen.txt").write_text(f"{zen}\n\n" * 100)
Path("notes.txt").write_text("Readability counts, and tests count more.\n" * 1000)

tokenizer = ByteLevelBPETokenizer()
tokenizer.train(["zen.txt"], vocab_size=512, special_tokens=["<|endoftext|>"], show_progress=False)
tokenizer.save("tokenizer.json")
