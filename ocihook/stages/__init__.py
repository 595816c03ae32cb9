"""A dump and a restore, stage by stage: who takes part, in which order, and what each does."""
