"""Gangs: containers of one distributed job that are dumped at one consistent cut, and restored, all or none."""
