"""The agent: outside every container, it does what the stages of CRIU ask for and answers for it until the end."""
