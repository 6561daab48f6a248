"""The GPT and the text of the demo, which `penstock train` knows too."""

from penstock.launch.gpt import Text, load_text, loss_of, make_gpt

__all__ = ["Text", "load_text", "loss_of", "make_gpt"]
