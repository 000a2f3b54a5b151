"""What a gate's result becomes: terminal, JSON, Markdown, JUnit, SARIF. None of them decides anything."""
