"""What was exported, in transformers."""

from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("zen-hf")
model = AutoModelForCausalLM.from_pretrained("zen-hf")
prompt = tokenizer("Explicit is", return_tensors="pt")
tokens = model.generate(**prompt, do_sample=False, max_new_tokens=20)
print(tokenizer.decode(tokens[0]))
