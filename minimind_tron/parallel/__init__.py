"""One strategy a file; each says in its first lines what is cut, and which ranks must talk."""
