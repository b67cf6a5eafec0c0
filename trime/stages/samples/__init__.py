"""Samples of text, translations and answers, shown with the memories behind them."""
