//! A collector of OpenTelemetry traces.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

/// A collector of traces: its address, and all that it was sent.
pub fn collector() -> (String, Arc<Mutex<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, sent) =
        (format!("http://{}", listener.local_addr().unwrap()), Arc::<Mutex<String>>::default());
    let kept = sent.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut reader = BufReader::new(&stream);
            let mut length = 0;
            for line in reader.by_ref().lines() {
                let line = line.unwrap().to_ascii_lowercase();
                length =
                    line.strip_prefix("content-length: ").map_or(length, |length| length.parse().unwrap());
                if line.is_empty() {
                    break;
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            kept.lock().unwrap().push_str(&String::from_utf8(body).unwrap());
            (&stream)
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                .unwrap();
        }
    });
    (address, sent)
}
