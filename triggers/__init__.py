"""Detectors of triggers, one per file; `docs/project/architecture.md` lists what a new kind of trigger needs."""
