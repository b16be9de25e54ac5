//! The wire to etcd: its messages, and one HTTP/2 connection to one member.
//!
//! A [`Client`] makes calls, watches keys and keeps leases alive. It makes progress while its [`Driver`] is polled, and
//! ends with it; no task is started. It never reconnects and never repeats a call: a [`WireError`] says whether the
//! call may have been carried out, and whether the connection is of further use.

mod auth;
mod client;
mod dial;
mod driver;
mod environment;
mod error;
mod exchange;
mod keep_alive;
pub mod messages;
mod settings;
mod url;
mod watch;

pub use self::client::Client;
pub use self::driver::Driver;
pub use self::environment::{Environment, Stream};
pub use self::error::{Reason, WireError};
pub use self::keep_alive::{KeepAlive, KeptAlive};
pub use self::settings::Settings;
pub use self::url::{Credentials, Endpoint, Url};
pub use self::watch::{KeyRange, Watch, WatchMessage};
