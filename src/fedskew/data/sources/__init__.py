"""Where data come from: named sets, files, folders, tables, a hub."""
