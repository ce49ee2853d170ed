"""Studies of attention: demo, scoreboard, recall, conversions and evidence, with the data and models that only they use.

They use the library; nothing of the library uses them. Each study is a command: `python -m research.scoreboard`.
"""
