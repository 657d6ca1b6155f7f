"""The warden of a server: a process that ends the server's tree. Imports the standard library only."""
