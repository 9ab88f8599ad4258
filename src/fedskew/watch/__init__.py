"""`fedskew watch`: runs in the browser while they go on."""
