//! The slots of a cluster and their nodes.

use redis::{Value, from_redis_value_ref};

use crate::backend::Shard;

const SLOTS: usize = 16384;
/// Stands for the index of an unknown master.
const UNKNOWN: u16 = u16::MAX;

/// Returns the slot of a key: that of its hash tag, if it has one.
pub(super) fn slot(key: &str) -> u16 {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(tag, _)| tag);
    crc16(tag.filter(|tag| !tag.is_empty()).unwrap_or(key).as_bytes()) % 16384
}

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| (crc << 8) ^ CRCS[usize::from((crc >> 8) ^ u16::from(*byte))])
}

/// The CRC of each byte.
const CRCS: [u16; 256] = {
    let mut crcs = [0; 256];
    let mut byte = 0_u16;
    while byte < 256 {
        let (mut crc, mut bit) = (byte << 8, 0);
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        crcs[byte as usize] = crc;
        byte += 1;
    }
    crcs
};

/// The master of each slot.
#[derive(Clone)]
pub(super) struct Slots {
    masters: Vec<Shard>,
    /// The index of the master of each slot.
    of: Box<[u16]>,
    /// All nodes, including replicas: each can be asked for the map.
    pub(super) nodes: Vec<(String, u16)>,
}

impl Slots {
    pub(super) fn unknown() -> Self {
        Self { masters: Vec::new(), of: vec![UNKNOWN; SLOTS].into(), nodes: Vec::new() }
    }

    /// Decodes the reply to `CLUSTER SLOTS`: `[first, last, [host, port, ...], replicas ...]` for each range. A node
    /// without a host is on the host that was `asked`.
    pub(super) fn read(answer: &Value, asked: &str) -> Option<Self> {
        let Value::Array(ranges) = answer else { return None };
        let mut slots = Self::unknown();
        for range in ranges {
            let Value::Array(range) = range else { return None };
            let [first, last, nodes @ ..] = &**range else { return None };
            let (first, last) = (number(first)?, number(last)?);
            for (i, node) in nodes.iter().enumerate() {
                let Value::Array(node) = node else { return None };
                let [host, port, ..] = &**node else { return None };
                let host: Option<String> = from_redis_value_ref(host).ok()?;
                let host = host.filter(|host| !matches!(&**host, "" | "?"));
                let node = (host.unwrap_or_else(|| asked.to_owned()), number(port)?);
                if i == 0 {
                    let master = slots.index(&shard(&node.0, node.1));
                    slots.of.get_mut(usize::from(first)..=usize::from(last))?.fill(master);
                }
                if !slots.nodes.contains(&node) {
                    slots.nodes.push(node);
                }
            }
        }
        Some(slots)
    }

    pub(super) fn master(&self, slot: u16) -> Option<&Shard> {
        self.masters.get(usize::from(*self.of.get(usize::from(slot))?))
    }

    /// Returns the masters that have slots, ordered by their first slots.
    pub(super) fn masters(&self) -> Vec<Shard> {
        let mut seen = vec![false; self.masters.len()];
        let first = |index: &&u16| {
            seen.get_mut(usize::from(**index)).is_some_and(|seen| !std::mem::replace(seen, true))
        };
        let masters = self.of.iter().filter(first);
        masters.map(|index| self.masters[usize::from(*index)].clone()).collect()
    }

    /// Changes the master of a slot.
    pub(super) fn set(&mut self, slot: u16, master: &Shard) {
        let master = self.index(master);
        if let Some(of) = self.of.get_mut(usize::from(slot)) {
            *of = master;
        }
    }

    /// Returns whether each slot has the same master in both.
    pub(super) fn is_same_map(&self, other: &Self) -> bool {
        (0..=u16::MAX).take(SLOTS).all(|slot| self.master(slot) == other.master(slot))
    }

    pub(super) fn is_complete(&self) -> bool {
        !self.of.contains(&UNKNOWN)
    }

    pub(super) fn has(&self, master: &Shard) -> bool {
        let index = self.masters.iter().position(|known| known == master);
        index.is_some_and(|index| self.of.iter().any(|of| usize::from(*of) == index))
    }

    fn index(&mut self, master: &Shard) -> u16 {
        let at = self.masters.iter().position(|known| known == master).unwrap_or_else(|| {
            self.masters.push(master.clone());
            self.masters.len() - 1
        });
        u16::try_from(at).unwrap_or(UNKNOWN)
    }
}

/// Returns the node at an address.
pub(super) fn shard(host: &str, port: u16) -> Shard {
    Shard::named(format!("{host}:{port}"))
}

/// Returns the address of a node.
pub(super) fn address(shard: &Shard) -> Option<(&str, u16)> {
    let (host, port) = shard.name()?.rsplit_once(':')?;
    Some((host, port.parse().ok()?))
}

fn number(value: &Value) -> Option<u16> {
    match value {
        Value::Int(number) => u16::try_from(*number).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use redis::parse_redis_value;

    use super::{Slots, address, shard, slot};

    #[test]
    fn slots_are_those_of_redis() {
        // As CLUSTER KEYSLOT replies.
        for (key, of) in [
            ("foo", 12182),
            ("semaphore:{foo}", 12182),
            ("{}foo", 9500),
            ("a{b}{c}", 3300),
            ("a{b", 13340),
        ] {
            assert_eq!(slot(key), of, "{key}");
        }
    }

    #[test]
    fn the_map_of_slots_is_read() {
        let wire = b"*2\r\n\
            *4\r\n:0\r\n:8191\r\n*3\r\n$2\r\nh1\r\n:7000\r\n$1\r\nx\r\n*3\r\n$2\r\nh2\r\n:7001\r\n$1\r\ny\r\n\
            *3\r\n:8192\r\n:16382\r\n*3\r\n$-1\r\n:7002\r\n$1\r\nz\r\n";
        let mut slots = Slots::read(&parse_redis_value(wire).unwrap(), "asked").unwrap();
        assert_eq!(slots.master(0), Some(&shard("h1", 7000)));
        assert_eq!(slots.master(16382), Some(&shard("asked", 7002)));
        assert_eq!(slots.master(16383), None);
        assert_eq!(slots.nodes.len(), 3);
        assert!(!slots.is_complete() && !slots.has(&shard("h2", 7001)));
        let before = slots.clone();
        slots.set(16383, &shard("h2", 7001));
        assert!(before.is_same_map(&before.clone()) && !before.is_same_map(&slots));
        assert!(slots.is_complete() && slots.has(&shard("h2", 7001)));
        assert_eq!(address(&shard("::1", 7)), Some(("::1", 7)));
        // An invalid range, with no nodes.
        assert!(
            Slots::read(&parse_redis_value(b"*1\r\n*2\r\n:5\r\n:20000\r\n").unwrap(), "").is_some()
        );
        let odd = b"*1\r\n*3\r\n:5\r\n:20000\r\n*2\r\n$1\r\nh\r\n:1\r\n";
        assert!(Slots::read(&parse_redis_value(odd).unwrap(), "").is_none());
    }
}
