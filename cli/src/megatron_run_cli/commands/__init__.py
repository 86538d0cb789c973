"""The commands, a file each: what they ask for, and what they print of the answer."""
