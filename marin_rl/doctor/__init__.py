"""Checks of everything a run needs: each reports a result, or an error that says what to do."""
