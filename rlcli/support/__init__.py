"""What every other package uses: files, reading, texts without secrets, imports, requests to servers, the machine."""
