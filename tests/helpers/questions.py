"""Questions of bAbI, as its files have them."""

from __future__ import annotations

BABI = """1 Mary moved to the bathroom.
2 John went to the hallway.
3 Where is Mary? \tbathroom\t1
4 Mary went to the garden.
5 Where is Mary? \tgarden\t4
1 Daniel took the apple.
2 Where is the apple? \thall\t1
3 Where is Daniel? \thall\t1
"""
